"""Grids of ggml's IQ types: rows of values that a code selects.

The tables are data of llama.cpp (MIT license, The ggml authors), packed and compressed.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import numpy as np
import numpy.typing as npt

_PACKED = {
    "IQ2_XXS": (
        "eNoFwcFq4kAYAOB/hn9kzGlGosQ9jRIXt0/xJyQSexqLlWxPiSi4bzEJo3R7isVCe7PFQ/ct9/sAOAiQEICGEAxM"
        "YQ53kEAGFkqoYQcOWniBL2AMmWJDRsyzdwac8ylvOUNEhROMkTDFAits0GOHNwTBhRRGLMQf4cRZ9HuqRz3fu/VA"
        "CillKOcykZm08kE+S+xTnwdhwBQqpSaKVKW86tSbAi210VY/aafjQT6AUIYmnIXL0IXRcDuE0WjEIoxURFETwViM"
        "r+PVDzDcBCYztXGmNb8mxQSmfMpijFVM8SaGWTLbzbqfcm7ml3l2xwhJUUQTiomooA1V1JCnjiAxSZ245JiwVKVF"
        "ukkPKWQyM5nLPrJBHuewYAUWqqAiL2BZLutlu8zvu3uw0mo7tsY6+2xxla5uq/NDt35dB49ss95AqctxuSvpt3zC"
        "SlVUHSqoH+toW21hJ3ZqP9j7fXoAx13gEtc6bKKGGt0yj175oSdfeTgujpdj/0Sn6sSf8a9+wU51cUfdZzc6u3P+"
        "CpfpJbus3pp388Gv9nq89j/hK7rZb/z3HwV8b10="
    ),
    "IQ2_XS": (
        "eNoFwVFP6jwYAOC3TbsUrtqlmOlVIWCQX9EunRledWYQPFeTyBcPv6Ij00yu0KBRrybxmMmv/J4HAAMFBl0QIOEE"
        "TkHBAEYwBgMWLmEKDq5hBgu4hTvwsIEHqOEZ9vABDSBEUIA6iKMQ9VCEzlAfDZFGMUpQijKUowLdoxJVaIcAY0wx"
        "wwJLrLDBFjs8wx5vMSKEBKRDOAlJj0SkT4ZEk5gkJCUZycmcFKQkFdkRoJhSyqigkipqqKWO3lJPUUACHpwHOoiD"
        "KgCGGWWMdZlgkik2YoZZ5tiCedawI0Md0uEd3Sk7Tx3oqu64+9ZtuogTHvAO5zzkPR7xPh9yzWOe8JRnPOcFX/OS"
        "V3zHQWBBBRNCSKGEEVY44cVevAkUkjAIeajDIgSJJZVMCimlkkZaOZVO3kkvUY/0eE/34ESeTE9QRCIehZGO8ugx"
        "glN6+t9pdvZ7BgorqpjqKqGkUsooq5zyqlGoT/q8r/tpf9WHwWDgB+0ADcmQDy+GeggjM7oefYzQ+dn5zzmM2bg7"
        "VuPZuB4fxvcXuws2UZPNpJ5sJ0gTHeiO5jrUPR3pvh5qrWOd6FRf6UznutArXepK7zQYbKhhRhhplDHGGme8eTAH"
        "g2IS8ziML2Idg8WWWmaFlfbUKmustc56u7coIQlPholOPhO47F7aS3eJUpLyVKdJmqfLFKZiaqdu+ndKrsBhRx1z"
        "wkmn3NgZZ51z3qGMZDzrZTqLM7i218drlJOc5/1c50Ve5l85zNjMz+pZf34//5rDQi7Mwi0+Fmc3+ia+efiDClLw"
        "Qhd5sSwei98CbofLq+XLEu5O7vhKr5LV9wrdr+9Hf4N1vl6uwWNPPfPCS6/8xBtvvfPeb3zrjx6VpAxKXuoyK29K"
        "2KiN32w2zabdoIpUvAqrXqWronqq4ME+/HuIHtePULN6VP+pfb2p2zp4Gmz9tt6+bdst2pEd3+ndfFft4HnwfPc8"
        "f3l6gT3d273bL/YXr7vXl1fzlr3/vE8/ep/FJzS4YU23Uc2kaZrs6+br5wsO+MAOk4M/NAf9/fq9+nn/6baqHbTj"
        "tmnblvxWv4+/4+Pk+Hw8Hv8HtxDu+w=="
    ),
    "IQ2_S": (
        "eNoFwUFvokwDAOAZMkMGTzNkMLCnwWBj/RUzZCDY02CwsT1ho5vu/gow0FhP2GDjfidr3Dddf+X3PABYAAMCBoAB"
        "DoYgAAKMwBhMgAIapGAGDJiDBViCFViDn+AXqMAWtGAHDqAHZ/AX3ACECNrQgRS60IM+DGEEJYxhAjOYwwI+widY"
        "wg18hTVsYAc/4BF+wSsElmVhi1jM4pawppaytJVaM8tYC6uyWmtv9dbFggghGzmIIhd5yEchitAdukcSxShBGXpA"
        "OSrQI3pCJXpBG1SjBr2hd9ShIzqhL3RFAFsYY4IHmGGOhzjAAo/xBCuscYpn2OA5XuAlXuE1rvAWt3iHD7jHZwxt"
        "ZNu2Y1Pbs6Wd2Jmd24Vd2rXd2J0NiEUwIYQRToYkIIKMyZQooklKZsSQOVmQJVmRNalIS3pyI9BBDnVcx3N8J3Sk"
        "kziZkzuFUzq10zlgwAZ8MBpMBtOBGfwZQIqoTR1KqUs96tOQRvSOShrThGY0pwV9pE+0pC90Q19pTRv6Rjt6pCf6"
        "Ra8UMIthRtiAMcbZkAVMsBEbswlTTLOUzZhhc7ZgS7Zia1axLWvZjh1Yz6CLXMelrueGbuRKN3Fzt3Brt3E7F3CL"
        "Y04445wPecAFH/MJV1zzlM+44XO+4Eu+4mte8S1v+Y4feM/PHHrIsz3Ho57reZ7vhV7kSS/2Ei/zcq/wSq/2Gq/z"
        "wBAPyZAN+VAM1VAPzbAa3obQR77tOz71Pd/3Q1/6sZ/4mZ/7hV/6td/4ILACHJCABTwQgQp0YIJfwSVAP+gP+ePx"
        "BxCWwIIIJrgYikAIMRZToYQWRszFQqxFJfaiFzcBQxTS0A29MAxlGIdJmIdFWIZ12IRdCEaD0Wg0GU1HemRGu9F+"
        "9D2CEYrsyIlo5EV+FEZRJKM4SqIsyqMiKqM6aqIuAmM8JmM25mMxVmM9NuOf42oM79AdvZN3T3dggidswidqoidm"
        "sp/cJvAe3dP74/1gOpqup7vpfgolkrZ0JJWu9KQvf8hQRvJOShnLRGbyQeaykI/ySZbyRW5kLRvZyaM8yS95lUBZ"
        "CiuimOJqqAIl1EiNlVJapWqmjJqrhVqqlVqrSm1Vq3bqoHp1VjBGMY3d2Iv9OIplnMRZnMdFXMZ13MRAWxprogea"
        "aa6HOtBCj/RYT7TSWqd6po2e64Ve6pVe60pvdat3+qB7fdYwQYmdOAlN3MRL/CRMokQmcZIkWZInRVImv5M6aZIu"
        "AamV4pSkLOWpSFWqU5NW6d8UZihzMpq5mZf5WZhFmcziLMmyLM+KrMyarMvAzJrhGZmxGZ+JmZrpmZlVs88ZfEAP"
        "9EE+AGMZbIhhhpuhCYwwIzM2E6OMNqmZGWPmZmGWZmXWpjJb05qdOZjewBzldu7kNHdzL/fzMI9ymcd5kmd5nhd5"
        "mdd5k3c5mOM5mbM5n4u5muu5mf+aV3NYoMIunIIWbuEVfhEWUSGLuEiKrMiLoiiLumiKrgALa4EXZMEWfCEWaqEX"
        "ZlEt4CN6pI93j/IRLK0lXpIlW/KlWKqlXprl87Jawif0RJ/kE3gOntvn72dYotIuaemWXumXYRmVskzKrMzLoizL"
        "puxKsLJWeEVWbMVXYqVWemVW1erPCr3QF/ny+PL1AtZ4TdZszddirdZ6bdbVGm7Qhm7k5mHzuvnYgJ/9T/iKXunr"
        "5vX0Cn5Nf8W/v36DyqpwRSpW8SqoRDWuVKUrU82rRbWsVlVVtdWh6itYo9qpae3WXu3XYR3Vso7rpM7qvC7qum7q"
        "rv5Xgy3eDrZsy7dqq7dmCxvU2I3T0MZtvMZvwkY2cZM0WZM3RVM2ddM0XQNaq8UtaVnLW9GqVremrdp9C9/QG327"
        "f5NvYId3bMd3aqd3ZnfZwXf0Lt8376P9cv+83+4ve9ihzulo53Ze53dRJ7u4S7qsy7uiK7u6a7quAwd8YAd+UAd9"
        "MIfnA/xAH/RDfvz3AXqrxz3pWc970ate96av+s8eHtGRHuXxdPw6gs/0c/0JT+hET3cnefp3An9mf+Z/uv+BMz4P"
        "zvw8Ok/P6qzP5nw5387ya/NlXQaX0WVymV62l91lf/m+wCu60qu8vl+vV/A3+Jv/N/iefF++i39v/8htcBO30W1y"
        "291ut/8Dvmbuvw=="
    ),
    "IQ3_XXS": (
        "eNoNzrmCqjAUANAsIO0loLZJAGkTEGkRQVpAHVsctzaCzPe/d77gIESQhVzkoTXiSCKNSjShGWFMMWCGBY6wwgne"
        "4zM2GBFCLOISTiTRJCU56ciVzARThwJlNKKGelZuVdbVmqzZwrZjJ3ZvZ4vHAhzfWTkH5+ZgoADAQEAAChLYQgMt"
        "IJe4rstd6WJGGTDGBFNsZMgjHve0d/ReHvZtv/X5Mlwel5+lvZLr4n+bcJd7nHPJN1zzkmNBhS1AMCGEEnfxFkYg"
        "SaQr15JLKXNZyIvEAQR+YIJvkIWnkEZxtI++EY5pvIrrGCtQTAkVqFY91aiQJpprrSt91DihCSRR0idj4qZpqrbN"
        "dtyibJHJ7JL5u93uvkvzIbeKdZEVeXEqrsV3z8u8LMqhfJXOoT5YVVc9qqg+1Ka2G2hYoxrW7lvTom7RbbpL5/dJ"
        "P/bkdDrBOTjH5/FMLvrS/oTX8hoO1XAcHoO43W7r38evuu/u1cN+9s/0Rd/iTY1tHAMmMb3ZfIoPG+uxH9G0nNJp"
        "mMR3/0UzmcNZ/f0DS/5ZHA=="
    ),
    "IQ3_S": (
        "eNoNkbl2qkAAQGdD2llY2pkBpB02bdmUlkWTFklMWkST9/svP3DPufcCAAECFrABBQxw4AAPSKBABDJQghqcQAcG"
        "MIEZLOABXuAfABBCBAmkkEEXShjAGCawgC28wTvc/nAQWchGFAnkIYUiZFCOanRCHRrQhFb0RBgz7GKJNU5whg+4"
        "xT0e8Td+4B8MiCA+USQkKSlJQwayEmQRS1ra2luZVVknq7O+rKe127Gd2CW7cffYARvZxJa2tvd2Zvf25U8IUkQJ"
        "pZRRQV3qU0k1TWhOD/RC3+iNbn/KkGG2Y5Q5TDHDMlaxno1sZb9/MTh3uc8lD3nKS97wK5/5xqEgwhZUCKFELIzI"
        "RSUWsQrsWA53HCdxMqd2zk7vXBzoUle4yjVu6g6u9EIv9lrv7EEf+9TnvvILv/IXf/WBhBJLS9qSSi4d6UklAxlL"
        "I1NZyUaeZC9H+S1X+ZQ/f4OQokooX2kVqUTlqlaDgppoWysdaKOPutKTftcP/dIgQIEVsEAHYZAEWVAHffAVwNAO"
        "ZRiEaViEVbiFPyGJWKSjY1RGU7RGYI/29l7tr/vb3opZvI9N3MR9jAwzwrjGN9okJjOFqU1rOjOYD/MwMMGJlTiJ"
        "SoKkTOZkS34TkPJUpmmap30KM5o5mcqCLM5MVmVN1mXX7JnhnOVervMkH/M5/8xhQQteREVatMVb8Sy8Q3WAR3yU"
        "R30sjqAkJS9lGZZxmZZV2ZdriSq7YpWodGWqomqqobpWsMY1rd1a1Vld1u/1Uq81aVgjGtnoJmmKBrSoDdtjW7aP"
        "1jrZJ3VaTuKcn+cz7dzOdE03dKinvdPrvuzbvuvH/qt/9XDAgzXwQQ3psA1gZGMwmvEwTiOa7IlO8dROw3SfnhO8"
        "kIu8pJfzhV/31+E6Xes39E7e9TubxezOyZzN8wxu8hbfPm98yZd6uS7Lsi7gw/lQH+VH9Nl8Lp/gju/5fb5bX+UX"
        "+xbfYCWrvcpVr4e1XC/rsqIHe4SP5nF6wI1sdPM2tZlt2NAzfRbP6Qlf1ku85Kt/6Z/6B/0mv+Dff5EgseA="
    ),
    "IQ1_S": (
        "eNoNl0HKslAAAEsyylWGSrayyKhOkR8q2convoe6ylDJTlGRYa4yfJKtLDKqU/7/CWYzMEytRtTIWqtG1egaWxNq"
        "w9qkNqspNVAza6jm13a1Qy2uJTVcK2vP2qf2qzXqZJ2uM3Wuztf7dbEu1dW6VjfqsO7U3bpXD+qbelRP61k9r1f1"
        "GkEQLYIiWEIghsSEmBEKAQib8IiQ2BEHIiYSIiUwURAl8SQ+xI+gG0yDa4gNqaE1YMNpeA2/kTaKRvUf3CBJskmy"
        "ZI/sk1NyTirkktRJQJokJBFpkytyTfrkhtySezIlMXkj7+SDfJEV+Sa/JNPkm1JTbupNowmbVnPVdJtBM2xGzbSZ"
        "NYtmrUW0Wi2qxbaE1rA1ac1aSgu0UMtv7VqHVtxKWrhVtp6tT+vXItt0m2nz7VFbbEttvQ3asO22vXbYTttZO28X"
        "7apdowiqRVEUSwnUkJpQM0qhAGVTLuVTO+pARVRMJRSmSupJfagf1enQHabDd0YdsSN15I7egR2r43a8jt8JO2kn"
        "6+SdR6fq1OkG3aTbdIfu0izdowf0iJ7SCr2kdRrQBm3SkEa0Ta9onz7SVxrTD/pF012my3XF7ryrdrWu0YVdq+t0"
        "vW7QjbppN+vm3apbZ5pMm2EYlukxPDNgxozEKIzKLJglAxiTgQxibGbN+MyGOTJn5sJkDGZuTMHcmQfzYirmyxAs"
        "yVIszTIsy3IszwrskBXZCTtjJVZmFVZlAWuwJgtZxNqsw7qsx/pswIbsjj2wRzZiYzZhL2zKZixmc7Zg72zJPtmK"
        "rXMNjuSaHMtxXI/rcwNuzM25P07mFG7BLTnAQQ5xFmdzLudxPrfhQm7LnbiEu3KYe3Ffju5xPbEn9eSe2tN6eg/2"
        "rJ7TW/XcntcLemEv6qW9rFf1OnyXZ/k+P+BF/o+XeYVf8IA3ecgj3uYdfsX7/JY/8yl/5TF/4x/8m//y7T7XH/XH"
        "fbmv9rW+3jf6sG/13X7QD/tRP+3n/Xu/JhBCS6AEVhCEoSAKE2EmKAIQbMEVfGEnHIRYSAQslMJTqISP8BPIAT1g"
        "BvxAHPwN5IE2gANr4AzcgTfwB8EgGlwG+aAYVIP6sDWkhvSQHQrD4XAynA2VIRiioT30h/thPEyG6RAPy+Fz+Bn+"
        "huSIGXEjfiSO5JEyUkfayBjBkTVyRsEoGqWjbFSMHqPqv96sOBCn4lxUxIUIRFOEoi2uRV/ciGfxImYiFm/iXXyI"
        "L/EtfkVy3Bl3x/xYHEtjbQzHq7E7DsfH8Wl8Gd/HtQkxaU2oCTsRJsPJZDKbKBMwMSf+ZDc5TOJJMiknz8ln8pu0"
        "p/SUmfJTcapOtakxhVN36k2DaTiNppdpPi2mr2k1rc2IWWtGzYTZcDaZzWbKDMzQzJ75s93sMItnyQzPytlz9pn9"
        "ZuScnnNzca7NjTmcW3Nn7s69eTDP5sX8MX/Pa1JdakhNqS11JVbipJ7UlwbSWJpKirSQlhKQTAlKSLIlR/KljbSV"
        "9tJROkkX6SphqZQe0lMi/+g/5o/7E/+kP+MP/jl/3l/4d/7L/qq/uszKvDyVFXkhL2UgmzKUkezKa9mXN/JW3ssn"
        "+Sxf5KuM5VJ+yF+5rhAKqVAKrTAKq3AKrwiKqMwUSZEVRVEVTdEVoJgKVJBiKbbiKp7iK4ESKgflqERKrKRKpmAl"
        "VwrlrlTKR/kpdZVU2yqjsmpP7asDdaRO1bn6pyrqQtVVoBoqVJFqq2vVVzfqXo3URM1UrD7Ul/pWyQW9YBf9hbj4"
        "W2gLfQEX1sJdeItgES6iRbrIFvmiWFSLukZqTY3SOhqjsVpPG2gjbazNNUVbakAzNFODGtJsbaWtNV8LtK120s7a"
        "VcNart20h/bS3tpX45byUl1qS7i0ls7SW4bLbFkt63pDJ/Wm3ta7Oqv39YE+0qf6XFf0hQ50U4c60m3d1zf6ST/r"
        "WL/ppf7Q3/r3fyhaoA0oQAMGsIADPcADAYhgDCZgBiQgAwWoQAM6AMAAJoAAAQvYwAEu8IAPAhCCA4hACjKAQQ4K"
        "UIIK/EDdaBpdgzX6xsAYGX+GYiwNYJgGNJBhG2vDNyLjYlwNbBTG3XgZDZM0aZMxWZMzeyZvDkzRnJgzUzJlUzFV"
        "UzOXpm4C0zShiUzLtE3HdM216Zm+GZihuTNjMzFTMzOxmZuF+TBfZmX+zDokYAOSsAnbsANp2IUMZCEHediHAziC"
        "IhzDKZxDCf5BGSpQhQuoQR0CaEATQoigBW3owBV0oQd9GMANDOEW7uERRvAME3iBKcwghjm8wQI+4AtW8A2/sIbq"
        "iEAN1EQt1EY0YhCLeohHAhqgIRohEY3RBE2RhBSkogXS0BLpCCADmQgihCxkIwe5yEM+CtEBReiEYnRGCUoRRnf0"
        "RBV6ow/6ooZFWk2rbXUs1upZA2tmKdbCWlrAMi1oIcuybGtlrS3P8q2DdbYu1tXC1s16WF+rbhM2aVM2bTM2a3M2"
        "b4u2ZMu2Yqu2Zus2sA3btKGNbMu2bcd2bc/27cAO7b0d2Wc7tTMb27l9swu7shtOy2GdviM4ojN2po7iLBzNAQ50"
        "kGM5trN2fGfjbJ29kzhXBzu5c3PuzsMhV8yKW/ErcSWv9BVcoZW1clbuylsFq3C1X+WralV3G27Tbbtdl3UH7tAd"
        "u1NXcTUXuNBFru36buBu3aObuFcXuw/37X5des2t+fV8La3VNVyjtbVeraN1us7X1Zr2uh7rcV7fG3hjb+rNvT9P"
        "8Rbe0gOe6UEPebbneCtv7fne0Yu8s3fxrl7mYS/3bt7de3gv7+uRfsunfNpnfc7nfdlXfNXXfN0HvulDH/m27/qe"
        "7/uBH/on/+wnfupjP/cL/+4//cp/+x+fCNoBGwjBOJgE02AeKMEiWAYgMAMYoMAKnGAV+MEm2AWHIAqSIAvy4BYU"
        "QRm8gnfwC7gNvxE30sbYwI2zcTfhJtqkm9vmvamHjbATsuEgHIXjcBrOQylUQjVchCA0Qxii0A5XoR9uw0N4DJMQ"
        "h4/wFVbhN6S33La3lbbyVtvqW7i1ts7W2/rbcHvaZtvb9r59b2s7YtfaUTthN9xNdrOdstN3YGfu0M7e+bvd7rCL"
        "d8kO78rdc/fZ/Xbknt4ze27P78W9tJf32l7fG3u4R3trb++9fbAP99H+vM/2+b7YV/vagTi0DtSBPQiH4WFymB3A"
        "wTzYB/+wOxwO8SE54EN5eB4+h9+BOfJH6SgfwREenaN79I7hMTsWx3rUjroRG/WjcTSN5pEUKdEiApEZwQhFduRE"
        "fhREm2gb7aNjdIrO0SW6Rji6Re+IPnEn/iSepJN80k7Lk36CJ/vknNxTcNqeolN6up9ep1pMxK2YitlYiIfxJJ7F"
        "UqzEIDZjO/bjMN7FhziOkxjHZfyMP/EvJs/NM31mztxZPEtn+ayetbN+Ns7w7Jzds3eOzvm5OFfnWkIkrYRK2ERI"
        "hskkmSVKAhIzQckuOSRxkiQ4KZNn8kl+CXmhL9yld+Ev4kW6qBftAi/WxbmEl+0luqSX7JJfikt1qaeNtJm2007K"
        "pr20nw7SUTpOp+k8VVI9BamZwhSldrpO/fSYntJritNb+khf6Tv9puSVvjJX/ipe5at61a761bjCq3UNruE1umbX"
        "/Pq91rNG1sw6GZv1snE2z5YZyMwMZiizMjtbZW62zvzsmJ2ya5ZlOLtlj+yb1TCJW5jCHUxjBrOYwzweYBFP8QxL"
        "WMYKVrGGdQywgU0MMcIWtrGDXexhHwc4xHsc4Rin+IozjHGOC3zHJX7iCn/wD9fzRt7J2ZzPhXycT3MlX+RaDnIj"
        "hznK7dzPN/khP+bnPMmveZbj/JW/829O3rgbfxNv0k296TfjBm/o5ty8m3+LbuktvxW36tYomkW76BTdgi16Rb8Q"
        "ikExKsbFvPgrlGJRLAtQmAUsUGEX68IvgmJb7ItjcSmuBS7uxaN4F+SdvYt3+a7etbt+h3fr7t6je3rP7vie32sl"
        "UbZKqmRLoRyWk3JWKiUozRKVdrkrD2VcJiUuy/JZfspfST7aD/rBPLgH/+g/1If2AA/4sB7Ow314j+hxeVwf+aN4"
        "EM/Wk3p2nvxz+Jw8Z0/lCZ7oaT/95+55eMbP5Imf5fP5/Dx/T/4lvqSX/NJf5gu+rJfzcl/+K3htXuErejWrdtWp"
        "uhVb9apxNa3+KqUClVnBClV25Vfbal8dq6g6VefqWuHq9n8+6Tf37r8Hb/Etv9X38m284Ru9rffqvX6f3pc3fufv"
        "4v14v97vd+1DfFof6iN8hp/JZ/YBH/ODPvZn9zl84k/ywZ/y8/x8Pr8P+WW+/HfwFb/SV//Cr/N1v8E3/F6++bf2"
        "I36tH/UTfsPf5Df7gZ/5Q7/d7/CLf8kP/8rf8/f5/X7/AK17TfE="
    ),
}
"""Indices into `_VALUES`, the first in the lowest bits, as zlib data in base 64."""

_VALUES: dict[str, tuple[int, ...]] = {
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1_S": (-1, 0, 1),
}
"""Values of a grid."""

_WIDTHS = {
    "IQ2_XXS": 8,
    "IQ2_XS": 8,
    "IQ2_S": 8,
    "IQ3_XXS": 4,
    "IQ3_S": 4,
    "IQ1_S": 8,
}
"""Values in a row."""


@cache
def grid_of(name: str) -> npt.NDArray[np.float32]:
    """Return the grid of a type, float32 ``[codes, values]``."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(_PACKED[name])), np.uint8)
    values = np.array(_VALUES[name], np.float32)
    bits = 2 if len(values) <= 4 else 4
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    indices = raw[:, None] >> shifts & np.uint8((1 << bits) - 1)
    return values[indices].reshape(-1, _WIDTHS[name])
